//! `oci-mps shares`: first what an operator asks for, allocated/total a GPU, then who has it.

use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use anyhow::Result;
use serde_json::{Value, json};

use super::table;
use crate::config::HostConfig;
use crate::gpu::{Gpu, Inventory};
use crate::inventory;
use crate::ledger::{Ledger, Owner, Record};
use crate::share::Promised;

pub(super) fn run(as_json: bool) -> Result<()> {
    let setting = super::setting()?;
    let config = HostConfig::load(setting.layout.config())?;
    let programs = setting.programs.map_err(anyhow::Error::msg)?;
    let inventory = inventory::current(&setting.layout, &config, &programs.oci_mps)?;
    let ledger = Ledger::new(&setting.layout);
    let records: Vec<Record> = ledger.records()?.into_iter().filter(Record::is_live).collect();
    if as_json {
        let mut out = io::stdout().lock();
        serde_json::to_writer_pretty(&mut out, &as_value(&inventory, &records))?;
        return Ok(writeln!(out)?);
    }
    table::print(
        ["GPU", "NAME", "ALLOCATED/TOTAL", "MEMORY", "CLIENTS"],
        inventory.gpus.iter().map(|gpu| totals(gpu, &inventory, &records)),
    )?;
    writeln!(io::stdout())?;
    table::print(
        ["CONTAINER", "GPU", "MEMORY", "THREADS", "SMS", "PROCESSES", "STATE", "SINCE"],
        records.iter().flat_map(|record| rows(record, &inventory)),
    )
}

fn promised(gpu: &Gpu, records: &[Record]) -> Promised {
    Promised::of(records.iter().map(|record| &record.share), &gpu.uuid)
}

fn totals(gpu: &Gpu, inventory: &Inventory, records: &[Record]) -> [String; 5] {
    let promised = promised(gpu, records);
    let (allocated, total) = (promised.memory.mib(), gpu.memory.mib());
    let percent = allocated * 100 / total.max(1);
    [
        gpu.index.to_string(),
        gpu.name.clone(),
        format!("{}/{}", promised.memory.to_string().trim_end_matches(" MiB"), gpu.memory),
        format!("({percent}%)"),
        format!("{}/{}", promised.clients, gpu.client_slots(inventory.cuda)),
    ]
}

/// A row for each of the container's GPUs.
fn rows(record: &Record, inventory: &Inventory) -> Vec<[String; 8]> {
    let (container, state) = match &record.owner {
        Owner::Reserved { holder, .. } => (format!("(process {})", holder.pid), "reserved"),
        Owner::Attached(container) => (container.id.chars().take(12).collect(), "attached"),
    };
    let share = &record.share;
    let row = |part: &crate::share::GpuShare| {
        let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == part.gpu);
        [
            container.clone(),
            gpu.map_or_else(|| part.gpu.to_string(), |gpu| gpu.index.to_string()),
            part.memory.to_string(),
            format!("{}%", share.threads),
            gpu.map_or_else(String::new, |gpu| gpu.sms_at(share.threads).to_string()),
            share.processes.to_string(),
            state.to_owned(),
            ago(record.since),
        ]
    };
    share.gpus.iter().map(row).collect()
}

fn ago(since: u64) -> String {
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(since);
    let seconds = SystemTime::now().duration_since(then).map_or(0, |ago| ago.as_secs());
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

fn as_value(inventory: &Inventory, records: &[Record]) -> Value {
    let gpus = inventory.gpus.iter().map(|gpu| {
        let promised = promised(gpu, records);
        json!({
            "index": gpu.index,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "memory_mib": gpu.memory,
            "allocated_mib": promised.memory,
            "clients": promised.clients,
            "client_slots": gpu.client_slots(inventory.cuda),
        })
    });
    json!({"gpus": gpus.collect::<Vec<_>>(), "shares": records})
}
