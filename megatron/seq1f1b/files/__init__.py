"""Files of users, each read by a declared type, with errors that name the place in the file; and files that are written
whole or not at all."""
