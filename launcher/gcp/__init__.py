"""Google's APIs: clients, credentials, errors and retries."""
