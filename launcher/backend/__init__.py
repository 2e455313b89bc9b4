"""What a service that runs jobs must do, and the router between Vertex AI and Compute Engine."""
