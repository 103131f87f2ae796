"""`python -m omni_offload` is the same as `omni-offload`."""

from .cli import main

if __name__ == "__main__":
    main()
