"""The kernel's side: libfuse callbacks, open files, the daemon, the mount table, doctor.

Knows `vfs.Tree` and nothing of checkpoints. The only room that imports the FUSE binding.
"""
