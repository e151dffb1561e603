"""A shell ignores Ctrl-C for what it starts in the background, and children inherit that; the tests need it."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
