"""The command line: one file per verb. Nothing else imports this package."""
