"""Plans of whole jobs and fleets: phases, memory, members, batch shares. Pure; no I/O."""
