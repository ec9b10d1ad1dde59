"""Makes `second_device` importable: pytest's importlib mode leaves the folder of tests out of sys.path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
