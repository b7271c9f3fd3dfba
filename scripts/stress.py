"""One session under many callers, many sessions one after the other, and a caller that is interrupted.

``python scripts/stress.py --seconds 60`` prints its seed and what it counted; whatever goes wrong ends it with a
traceback of every thread, also when nothing happens any more.
"""

from __future__ import annotations

import argparse
import faulthandler
import secrets
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from stress_scenarios import cycles, hammer, interrupts

#: So much longer than asked for a part may take, in seconds.
_PATIENCE_S = 120
#: More growth than this, in MB, is a leak.
_MOST_MB = 32.0


def main() -> None:
    """Run all parts in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of many callers, and a quarter of that of interrupts"
    )
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--cycles", type=int, default=1000, help="sessions that are closed, and as many that are not")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    given = parser.parse_args()
    print(f"seed {given.seed}")

    faulthandler.dump_traceback_later(given.seconds + _PATIENCE_S, exit=True)
    found = hammer(given.seconds, given.threads, given.seed)
    print(f"{given.threads} threads: {found.calls} calls, all right; grown by {found.grown_mb:.1f} MB")
    grown = [found.grown_mb]

    faulthandler.dump_traceback_later(given.seconds / 4 + _PATIENCE_S, exit=True)
    found = interrupts(given.seconds / 4, given.seed)
    print(f"interrupts: {found.calls} calls, {found.interrupted} interrupted, all others right")

    for close in (True, False):
        faulthandler.dump_traceback_later(given.cycles / 5 + _PATIENCE_S, exit=True)
        found = cycles(given.cycles, close=close)
        how = "closed" if close else "let go of"
        print(f"{found.calls} sessions {how}: grown by {found.grown_mb:.1f} MB, {found.threads} threads left")
        grown.append(found.grown_mb)
        if found.threads:
            sys.exit("threads are left over")
    faulthandler.cancel_dump_traceback_later()
    if max(grown) > _MOST_MB:
        sys.exit(f"memory grew by {max(grown):.1f} MB")


if __name__ == "__main__":
    main()
