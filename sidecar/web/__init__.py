"""Page, JSON API, event stream and health."""
