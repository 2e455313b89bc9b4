# What `launch setup --for both --yes` creates (docs/project.md). It has never been applied: check the plan first.

terraform {
  required_providers {
    google = { source = "hashicorp/google", version = ">= 6.0" }
  }
}

variable "project" { type = string }

variable "region" {
  type    = string
  default = "us-central1"
}

variable "users" {
  type        = list(string)
  description = "IAM members who launch jobs: user:you@example.com, group:…"
}

variable "vms" {
  type        = bool
  default     = false
  description = "Also prepare the project for VMs."
}

variable "network" {
  type    = string
  default = "default"
}

locals {
  suffix = var.network == "default" ? "" : "-${var.network}"
}

resource "google_project_service" "api" {
  for_each           = toset(concat([
    "artifactregistry.googleapis.com",
    "cloudbilling.googleapis.com",
    "cloudbuild.googleapis.com",
    "cloudquotas.googleapis.com",
    "cloudresourcemanager.googleapis.com",
    "iam.googleapis.com",
    "logging.googleapis.com",
    "monitoring.googleapis.com",
    "orgpolicy.googleapis.com",
    "policytroubleshooter.googleapis.com",
    "secretmanager.googleapis.com",
    "storage.googleapis.com",
    "aiplatform.googleapis.com"
  ], var.vms ? [
    "compute.googleapis.com",
    "iap.googleapis.com",
    "oslogin.googleapis.com"
  ] : []))
  project            = var.project
  service            = each.value
  disable_on_destroy = false
}

resource "google_artifact_registry_repository" "images" {
  project       = var.project
  location      = "us"
  repository_id = "launch"
  format        = "DOCKER"
  depends_on    = [google_project_service.api]
}

resource "google_storage_bucket" "runs" {
  project                     = var.project
  name                        = "${var.project}-launch"
  location                    = var.region
  uniform_bucket_level_access = true

  soft_delete_policy {
    retention_duration_seconds = 0
  }
}

resource "google_service_account" "trainer" {
  project    = var.project
  account_id = "launch"
  depends_on = [google_project_service.api]
}

resource "google_storage_bucket_iam_member" "runs" {
  bucket = google_storage_bucket.runs.name
  role   = "roles/storage.objectUser"
  member = google_service_account.trainer.member
}

resource "google_project_iam_member" "logwriter" {
  project = var.project
  role    = "roles/logging.logWriter"
  member  = google_service_account.trainer.member
}

resource "google_project_iam_member" "secretaccessor" {
  project = var.project
  role    = "roles/secretmanager.secretAccessor"
  member  = google_service_account.trainer.member
}

resource "google_artifact_registry_repository_iam_member" "pull" {
  count      = var.vms ? 1 : 0
  project    = var.project
  location   = google_artifact_registry_repository.images.location
  repository = google_artifact_registry_repository.images.name
  role       = "roles/artifactregistry.reader"
  member     = google_service_account.trainer.member
}

resource "google_service_account_iam_member" "users" {
  for_each           = toset(var.users)
  service_account_id = google_service_account.trainer.name
  role               = "roles/iam.serviceAccountUser"
  member             = each.value
}

resource "google_compute_firewall" "iap_ssh" {
  count         = var.vms ? 1 : 0
  project       = var.project
  name          = "launch-iap-ssh${local.suffix}"
  network       = var.network
  source_ranges = ["35.235.240.0/20"]

  allow {
    protocol = "tcp"
    ports    = ["22"]
  }
}

data "google_compute_subnetwork" "nodes" {
  count   = var.vms ? 1 : 0
  project = var.project
  region  = var.region
  name    = var.network
}

resource "google_compute_firewall" "internal" {
  count         = var.vms ? 1 : 0
  project       = var.project
  name          = "launch-internal-${var.region}${local.suffix}"
  network       = var.network
  source_ranges = [data.google_compute_subnetwork.nodes[0].ip_cidr_range]

  allow {
    protocol = "tcp"
  }
}

resource "google_compute_router" "nat" {
  count   = var.vms ? 1 : 0
  project = var.project
  region  = var.region
  name    = "launch-nat${local.suffix}"
  network = var.network
}

resource "google_compute_router_nat" "nat" {
  count                              = var.vms ? 1 : 0
  project                            = var.project
  region                             = var.region
  router                             = google_compute_router.nat[0].name
  name                               = "launch-nat${local.suffix}"
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}
