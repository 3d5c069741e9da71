"""The command line: one module a command, ``main`` assembles them. Importing this loads neither torch nor rich."""
