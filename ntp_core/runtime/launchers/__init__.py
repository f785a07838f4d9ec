"""Ways to start the ranks of a job: on this machine, over Ray; and how a rank learns its place."""
