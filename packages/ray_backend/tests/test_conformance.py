from kapell.workergroup.conformance import *  # noqa: F403
