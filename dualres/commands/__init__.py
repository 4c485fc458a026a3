"""The commands of `dualres`, one file each, as `cli` lists them; `arguments` has what several of them share.

The first line of a command's docstring is its summary in `dualres --help`, the rest and EPILOG are its own help;
`add_arguments` declares its arguments and `run` runs it.
"""
