"""What an audit must say of a log, told by the facts about the format; imports nothing of ours."""
