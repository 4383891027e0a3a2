"""The commands. One module per command, named after it. Parses, prints, sets exit codes; decides nothing."""
