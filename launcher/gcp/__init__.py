"""Google's APIs: clients, credentials, errors and retries."""

from launcher.gcp.lazy_services import import_services_lazily

import_services_lazily()
