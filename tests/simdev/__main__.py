"""``python -m simdev`` builds the simulated device ahead of its first use, and says where it is."""

import sys
import time

from .build import SimdevUnavailable, library

if __name__ == "__main__":
    begin = time.perf_counter()
    try:
        path = library()
    except SimdevUnavailable as error:
        sys.exit(f"simdev: {error}")
    print(f"{path} ({time.perf_counter() - begin:.1f} s)")
