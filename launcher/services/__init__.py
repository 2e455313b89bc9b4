"""The interface of a service that runs jobs, the router between the two services, and parsers of their requests."""
