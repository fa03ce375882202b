//! `oci-mps gpus`: what can be shared. With NVML as the source it asks the driver, and leaves the answer where
//! starting containers read it.

use std::io::{self, Write};

use anyhow::Result;

use super::table;
use crate::config::HostConfig;
use crate::inventory;

pub(super) fn run(as_json: bool) -> Result<()> {
    let layout = super::layout();
    let config = HostConfig::load(layout.config())?;
    let inventory = inventory::probe(&layout, &config)?;
    if as_json {
        let mut out = io::stdout().lock();
        serde_json::to_writer_pretty(&mut out, &inventory)?;
        return Ok(writeln!(out)?);
    }
    let rows = inventory.gpus.iter().map(|gpu| {
        [
            gpu.index.to_string(),
            gpu.name.clone(),
            gpu.memory.to_string(),
            gpu.sms.to_string(),
            gpu.compute_capability.to_string(),
            gpu.client_slots(inventory.cuda).to_string(),
            if gpu.mig { "yes: cannot be shared" } else { "no" }.to_owned(),
            gpu.uuid.to_string(),
        ]
    });
    table::print(["GPU", "NAME", "MEMORY", "SMS", "COMPUTE", "CLIENTS", "MIG", "UUID"], rows)
}
