"""What every other part of penstock uses: errors, statistics, events, units, the host. Imports nothing of penstock."""
