"""Parts of the record of a turn that describe tokens beyond their ids."""
