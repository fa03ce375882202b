//! Where engines come in: each program, and each hook, as the engine calls it.

pub mod lifecycle;
pub mod precreate;
pub mod programs;
pub mod report;
pub mod runtime;
pub mod shim;
