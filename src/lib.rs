//! oci-mps (crate documentation follows with the rooms)
pub mod config;
pub mod control;
pub mod file;
pub mod gpu;
pub mod kernel;
pub mod layout;
pub mod plan;
pub mod quantity;
pub mod request;
pub mod share;
pub mod size;
pub mod spec;
