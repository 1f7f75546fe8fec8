"""How a model is spread over ranks; applied to it from outside, in the order that `apply.py` lists."""
