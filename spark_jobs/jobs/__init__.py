"""The jobs as commands: arguments, session and output; what a job does stands above this folder."""
