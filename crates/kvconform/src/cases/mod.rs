//! The cases, by kernel. A case runs for every backend and element type.

use crate::bench::{Bench, Outcome};

mod attend;
mod blocks;
mod memory;
mod order;
mod rope;
mod rows;

/// One case of the suite.
#[derive(Clone, Copy)]
pub struct Case {
    /// `kernel::what_is_claimed`.
    pub name: &'static str,
    /// Checks the claim.
    pub run: fn(&Bench) -> Outcome,
}

macro_rules! cases {
    ($($module:ident::$name:ident),* $(,)?) => {
        /// Every case of the suite.
        pub const CASES: &[Case] =
            &[$(Case { name: concat!(stringify!($module), "::", stringify!($name)), run: $module::$name },)*];
    };
}

cases! {
    memory::is_zeroed_and_refuses_nothing,
    memory::host_copies_round_trip,
    memory::host_copies_check_length_and_density,
    order::a_stream_keeps_its_order,
    order::events_order_streams,
    order::dropping_handles_loses_no_work,
    rows::scatter_puts_rows_where_slots_say,
    rows::scatter_takes_head_major_rows,
    rows::scatter_rounds_f32_rows,
    rows::scatter_keeps_nan_and_infinity,
    rows::wrong_scatters_are_refused_and_write_nothing,
    rows::gather_reads_what_scatter_wrote,
    rows::gather_rotates_keys_on_the_way,
    blocks::copy_moves_all_layers_and_nothing_else,
    blocks::swap_goes_between_layouts,
    blocks::wrong_copies_are_refused,
    blocks::rotated_copies_equal_keys_rotated_there,
    blocks::rotation_keeps_length_and_the_original,
    rope::rows_are_rotated_in_both_pairings,
    rope::a_part_of_a_row_can_be_rotated,
    rope::the_attention_factor_enters_once,
    rope::positions_past_the_limit_are_refused,
    attend::prefill_and_decode_in_one_call,
    attend::segments_at_offsets,
    attend::the_same_blocks_at_two_offsets_at_once,
    attend::causality_goes_by_logical_order,
    attend::windows_go_by_position,
    attend::softcap_temperature_and_groups,
    attend::rows_that_see_nothing_are_zero,
    attend::nan_reaches_the_output,
    attend::rotated_queries_need_no_table,
    attend::wrong_attends_are_refused,
    attend::output_in_the_element_type,
}
