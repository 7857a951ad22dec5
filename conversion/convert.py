"""The command `txl-convert` as a script of the repository. docs/conversion.md has a command for each original."""

import sys

from txl_hf.conversion.command_line import main  # type: ignore[import-not-found]  # its name once installed

if __name__ == "__main__":
    sys.exit(main())
