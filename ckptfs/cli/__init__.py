"""The commands. One module a command, named after it. Parses, prints, sets exit codes; decides nothing."""
