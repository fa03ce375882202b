//! Containers that share a GPU through NVIDIA MPS, each with the share its annotations ask for.
//!
//! # The way of one container
//!
//! `podman run --annotation oci-mps/memory=8GiB --annotation oci-mps/threads=25 …` makes an engine write a
//! `config.json`. Before the low-level runtime reads it, one of the [`entry`] points has it in hand:
//!
//! 1. [`entry::runtime`] stands in front of `runc` and finds the bundle on the command line; [`entry::precreate`] is
//!    podman's hook and gets the document on standard input; [`entry::shim`] brings `containerd` to the former.
//! 2. [`inject::concerns`] searches the bytes. Most containers end here: nothing is parsed, nothing is locked.
//! 3. [`spec`] reads the document, [`request`] its annotations (in the grammar of [`size`] and [`quantity`]),
//!    [`config`] what the host's administrator decided.
//! 4. [`inventory`] says which [`gpu`]s there are, [`daemon`] makes sure that MPS runs and answers (through
//!    [`control`]) and that containers have a way to it.
//! 5. Under the lock of the [`ledger`], [`plan`] decides from all of that, purely: a [`share`] and the edits that give
//!    it, or a refusal that says what would work. The share is reserved.
//! 6. [`spec`] applies the edits; everything else in the document stays as it was. It is written whole ([`mod@file`]), and
//!    the runtime's entry becomes the real runtime.
//! 7. [`entry::lifecycle`] is called by the hooks that the edit put there: `createRuntime` ties the share to the
//!    container that now exists, `poststop` gives it back.
//!
//! # The order of the rooms
//!
//! They are declared below in their order: a room uses those above it and never one below (`tests/rooms.rs` keeps it
//! so). Decisions are pure functions over values; each effect happens in one place.

// what everything stands on: amounts, files, the kernel, paths
pub mod quantity;
pub mod file;
pub mod layout;
pub mod kernel;

// data: GPUs, what may be asked for, what was promised
pub mod gpu;
pub mod size;
pub mod share;
pub mod origin;

// what comes in
pub mod config;
pub mod request;
pub mod spec;

// the decision
pub mod plan;

// the effects
pub mod inventory;
pub mod control;
pub mod ledger;
pub mod daemon;

// the one path, and those who walk it
pub mod inject;
pub mod entry;
pub mod cli;
