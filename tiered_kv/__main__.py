"""``python -m tiered_kv``: the command line."""

import sys

from tiered_kv.cli import main

sys.exit(main())
