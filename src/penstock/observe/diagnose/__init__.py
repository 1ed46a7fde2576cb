"""From measurements to findings: pure functions, which read frozen snapshots and touch nothing else.

`diagnose` reads an `Examination` (the doctor's), `findings_of_run` a `RunRecord` (what `penstock run` keeps).
"""

from penstock.observe.diagnose.all import Diagnosis, diagnose
from penstock.observe.diagnose.run import findings_of_run

__all__ = ["Diagnosis", "diagnose", "findings_of_run"]
