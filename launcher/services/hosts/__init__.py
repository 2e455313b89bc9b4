"""Machines that are reached by SSH, as a service that runs jobs."""
