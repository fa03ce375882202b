//! `oci-mps status`: how the daemon is, and what it serves. It changes nothing, and what it may not see it says.

use std::io::{self, Write};

use anyhow::Result;
use serde_json::{Value, json};

use super::table;
use crate::config::HostConfig;
use crate::control::Control;
use crate::daemon::Daemon;

pub(super) fn run(as_json: bool) -> Result<()> {
    let layout = super::layout();
    let config = HostConfig::load(layout.config())?;
    let status = Status::of(&Daemon::new(&layout, &config.daemon));
    if as_json {
        let mut out = io::stdout().lock();
        serde_json::to_writer_pretty(&mut out, &status.as_value())?;
        return Ok(writeln!(out)?);
    }
    let mut rows = vec![["daemon".to_owned(), status.health()]];
    rows.push(["program".to_owned(), status.program.clone().unwrap_or_else(|missing| missing)]);
    if let Ok(multi_user) = status.multi_user {
        let users =
            if multi_user { "at once" } else { "one after the other: this driver has no multi-user mode" };
        rows.push(["users".to_owned(), users.to_owned()]);
    }
    let way = match &status.way {
        Ok(()) => format!("through {}", layout.client().display()),
        Err(why) => why.clone(),
    };
    rows.push(["containers".to_owned(), way]);
    for server in &status.servers {
        let clients =
            server.clients.as_ref().map_or_else(Clone::clone, |clients| format!("{clients} client(s)"));
        rows.push(["server".to_owned(), format!("process {}, {}, {clients}", server.pid, server.state)]);
    }
    table::print(["WHAT", "HOW IT IS"], rows)
}

/// What could be learnt; else why not.
struct Status {
    pid: Result<Option<i32>, String>,
    program: Result<String, String>,
    multi_user: Result<bool, String>,
    answers: Result<(), String>,
    way: Result<(), String>,
    servers: Vec<Server>,
}

struct Server {
    pid: u32,
    state: String,
    clients: Result<usize, String>,
}

impl Status {
    fn of(daemon: &Daemon) -> Self {
        let control = daemon.control().map_err(|error| error.to_string());
        let pid = daemon.process().map_err(|error| error.to_string());
        let runs = matches!(pid, Ok(Some(_)));
        let ask = |control: &Control| control.answers().map_err(|error| error.to_string());
        let answers = match &control {
            Ok(control) if runs => ask(control),
            _ => Err("it does not run".to_owned()),
        };
        let servers = match &control {
            Ok(control) if answers.is_ok() => servers(control),
            _ => Vec::new(),
        };
        Self {
            program: control
                .as_ref()
                .map(|control| control.path().display().to_string())
                .map_err(Clone::clone),
            multi_user: control
                .as_ref()
                .map_err(Clone::clone)
                .and_then(|control| control.abilities().map_err(|error| error.to_string()))
                .map(|abilities| abilities.multi_user),
            way: if runs {
                daemon.check().map_err(|error| error.to_string())
            } else {
                Err("no way in".to_owned())
            },
            pid,
            answers,
            servers,
        }
    }

    fn health(&self) -> String {
        match (&self.pid, &self.answers) {
            (Err(unseen), _) => format!("not to be seen: {unseen}"),
            (Ok(None), _) => "does not run; the first container or 'oci-mps up' starts it".to_owned(),
            (Ok(Some(pid)), Ok(())) => format!("process {pid}, answers"),
            (Ok(Some(pid)), Err(silent)) => format!("process {pid}, but {silent}"),
        }
    }

    fn as_value(&self) -> Value {
        let servers = self.servers.iter().map(|server| {
            json!({"pid": server.pid, "state": server.state, "clients": server.clients.as_ref().ok()})
        });
        json!({
            "daemon": {
                "runs": self.pid.as_ref().ok().map(Option::is_some),
                "pid": self.pid.as_ref().ok(),
                "answers": self.answers.is_ok(),
                "health": self.health(),
                "program": self.program.as_ref().ok(),
                "multi_user": self.multi_user.as_ref().ok(),
            },
            "containers_reach_it": self.way.is_ok(),
            "servers": servers.collect::<Vec<_>>(),
        })
    }
}

fn servers(control: &Control) -> Vec<Server> {
    let describe = |pid| Server {
        state: control
            .server_status(pid)
            .map_or_else(|error| error.to_string(), |state| format!("{state:?}")),
        clients: control.client_list(pid).map(|clients| clients.len()).map_err(|error| error.to_string()),
        pid: pid.get(),
    };
    control.server_list().unwrap_or_default().into_iter().map(describe).collect()
}
