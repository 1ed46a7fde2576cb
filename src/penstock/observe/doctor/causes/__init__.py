"""From measurements to findings: pure functions, which read frozen snapshots and touch nothing else.

`diagnose` reads `Measurements` (the doctor's), `findings_of_run` a `RunRecord` (what `penstock run` keeps).
"""

from penstock.observe.doctor.causes.diagnose import Diagnosis, diagnose
from penstock.observe.doctor.causes.finished_run import findings_of_run

__all__ = ["Diagnosis", "diagnose", "findings_of_run"]
