def write_standalone(*a):
    raise ValueError("x")


def check_standalone(*a):
    raise ValueError("x")
