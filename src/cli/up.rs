//! `oci-mps up` and `down`: the control daemon before the first container needs it, and after the last.

use std::io::{self, Write};
use std::time::Duration;

use anyhow::{Result, bail};

use crate::config::HostConfig;
use crate::daemon::{Daemon, Ready};
use crate::inventory;
use crate::ledger::{Ledger, Record};

/// Starts the daemon, or takes over the one that runs, and leaves the inventory where starting containers read it.
pub(super) fn up() -> Result<()> {
    let layout = super::layout();
    let config = HostConfig::load(layout.config())?;
    let inventory = inventory::probe(&layout, &config)?;
    let daemon = Daemon::new(&layout, &config.daemon);
    let found = match daemon.start()? {
        Ready::Already => "runs already",
        Ready::Adopted => "ran already, and containers now have a way to it",
        Ready::Started => "was started",
    };
    let pid = daemon.process()?.unwrap_or_default();
    writeln!(
        io::stdout(),
        "the MPS control daemon (process {pid}) {found}; GPUs to share: {}",
        inventory.gpus.len()
    )?;
    Ok(())
}

/// Ends the daemon. Containers that have a share are shown and kept, unless they are to end with it.
pub(super) fn down(wait: Duration, force: bool) -> Result<()> {
    let layout = super::layout();
    let config = HostConfig::load(layout.config())?;
    let holders: Vec<String> = Ledger::new(&layout)
        .records()?
        .iter()
        .filter(|record| record.is_live())
        .map(Record::holder_name)
        .collect();
    if !holders.is_empty() && !force && wait.is_zero() {
        bail!(
            "{} container(s) have a share: {}; stop them, wait for them with --wait SECONDS, or end their CUDA \
             processes with --force",
            holders.len(),
            holders.join(", ")
        );
    }
    let daemon = Daemon::new(&layout, &config.daemon);
    let ran = daemon.stop(force.then_some(Duration::from_secs(1)), wait.max(Duration::from_secs(5)))?;
    writeln!(
        io::stdout(),
        "{}",
        if ran { "the MPS control daemon has ended" } else { "no MPS control daemon ran" }
    )?;
    Ok(())
}
