"""Machines that are reached by SSH: run a command there, send files, and read a folder as a Storage."""
