"""A job whose ranks come and go: who is a member, what was decided, and how the job goes on."""
