# Modules imported and nothing enabled: only the clean-up of an earlier configuration is left.
{ }
