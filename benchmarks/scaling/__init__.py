"""How loading grows: formulas for a fleet, a formula and a simulation for one trainer, and how both are checked."""
