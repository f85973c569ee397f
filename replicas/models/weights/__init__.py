"""Where weights come from: files of each kind, random numbers, and what of them a rank keeps."""
