"""The main job: an uneven job on real text, hurt on purpose, watched, healed and explained."""
