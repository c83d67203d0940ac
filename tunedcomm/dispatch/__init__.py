"""Groups, decisions and launches: from a problem to what runs."""
