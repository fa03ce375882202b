//! oci-mps (crate documentation follows with the rooms)
pub mod config;
pub mod file;
pub mod gpu;
pub mod kernel;
pub mod layout;
pub mod quantity;
pub mod size;
