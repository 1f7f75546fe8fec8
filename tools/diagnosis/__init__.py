"""What tools/doctor.py looks at: one file per kind of finding, each a frozen dataclass that JSON can hold."""
