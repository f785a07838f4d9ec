"""`python -m sidecar` is `ntp-sidecar`."""

import sys

from sidecar.cli import main

sys.exit(main())
