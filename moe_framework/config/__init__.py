"""Configuration: the schema with every default, composition by Hydra, and pure validation without torch.

`schema.py` holds the keys and their defaults, `keys.py` looks them up, `command_line.py` reads the arguments,
`load.py` composes YAML and overrides, `structure.py` turns the result into the frozen dataclasses and checks
types, and `validate.py` checks the rules between keys (`rules.py`).
"""
