//! Tables for people: aligned, without lines, so that they can be cut and searched.

use std::io::{self, Write};

use anyhow::Result;
use comfy_table::{ContentArrangement, Table, presets};

/// Prints the heads and the rows.
pub(super) fn print<const N: usize>(
    heads: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> Result<()> {
    Ok(io::stdout().write_all(text(heads, rows).as_bytes())?)
}

/// The heads and the rows.
pub(super) fn text<const N: usize>(heads: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(heads).add_rows(rows);
    table.column_iter_mut().for_each(|column| {
        column.set_padding((0, 2));
    });
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}
