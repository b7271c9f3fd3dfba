"""Stress sessions: one session with many concurrent callers, many sessions in sequence, and an interrupted caller.

    python scripts/stress.py --seconds 60 --cycles 1000

Takes about three minutes with the defaults and writes no file. Prints the seed and counts. A wrong output, a leak or a
deadlock ends the program with an error; a deadlock also prints the traceback of every thread.
"""

from __future__ import annotations

import argparse
import faulthandler
import secrets
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from stress_scenarios import call_concurrently, interrupt_calls, recreate_sessions

#: Seconds that a part may take beyond its duration before it counts as deadlocked.
_GRACE_S = 120
#: Growth in MB that counts as a leak.
_LEAK_MB = 32.0


def main() -> None:
    """Run all parts one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of concurrent calls; interrupts take a quarter of it"
    )
    parser.add_argument("--threads", type=int, default=32, help="concurrent callers (default: 32)")
    parser.add_argument("--cycles", type=int, default=1000, help="sessions that are closed, and as many that are not")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help="default: random")
    given = parser.parse_args()
    print(f"seed {given.seed}")

    faulthandler.dump_traceback_later(given.seconds + _GRACE_S, exit=True)
    found = call_concurrently(given.seconds, given.threads, given.seed)
    print(f"{given.threads} threads: {found.calls} calls, all correct; memory grew by {found.grown_mb:.1f} MB")
    grown = [found.grown_mb]

    faulthandler.dump_traceback_later(given.seconds / 4 + _GRACE_S, exit=True)
    found = interrupt_calls(given.seconds / 4, given.seed)
    print(f"interrupts: {found.calls} calls, {found.interrupted} interrupted, all others correct")

    for close in (True, False):
        faulthandler.dump_traceback_later(given.cycles / 5 + _GRACE_S, exit=True)
        found = recreate_sessions(given.cycles, close=close)
        how = "closed" if close else "deleted without closing"
        print(f"{found.calls} sessions {how}: memory grew by {found.grown_mb:.1f} MB, {found.threads} threads remain")
        grown.append(found.grown_mb)
        if found.threads:
            sys.exit("threads of deleted sessions remain")
    faulthandler.cancel_dump_traceback_later()
    if max(grown) > _LEAK_MB:
        sys.exit(f"memory grew by {max(grown):.1f} MB, more than {_LEAK_MB:.0f} MB")


if __name__ == "__main__":
    main()
