"""Fill the table of undecided transactions at a start: snapshot and log replay."""
