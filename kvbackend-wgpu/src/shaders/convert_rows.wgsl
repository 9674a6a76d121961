// Converts rows: scatter and gather if the format changes or keys are rotated, and rope, rotate_keys,
// quantize and dequantize. A workgroup reads one row of one head into its memory as f32, rotates it, and
// writes it. A row that is converted in place is read completely before any of it is written.
//
// Elements past the rotated pairs keep their bits if both sides have the same type.
//
// args: [items, n0, n1, strides of the two axes (source, destination, scales of the source, scales of the
// destination each), first row of the angles, attention factor], then each item's offsets in these four
// buffers, and the position by which it is rotated. Offsets are in elements or in scales.

@group(0) @binding(3) var<storage, read_write> source_scales: array<u32>;
@group(0) @binding(4) var<storage, read_write> dest_scales: array<atomic<u32>>;
// The cosine and sine of each pair, by position.
@group(0) @binding(5) var<storage, read> angles: array<vec2<f32>>;

override SOURCE: u32;
// The number of elements that share a scale: an integer format's group, or the whole row for any other
// format.
override PER_SCALE: u32;
// The number of rotated pairs, or 0 if there is no rotation.
override PAIRS: u32;
override INTERLEAVED: bool;
// The number of scales per row. It must be an override with a name, because naga 30 replaces every unnamed
// size expression by the value of the last override.
override GROUPS: u32 = DIM / PER_SCALE;

const HEADER: u32 = 13u;
const PER_ITEM: u32 = 5u;

var<workgroup> steps: array<f32, GROUPS>;
// The index of the row's first element in the source, and the static scale of an fp8 destination.
var<private> origin: u32;
var<private> static_scale: f32 = 1.0;

fn source_scale(at: u32, element: u32) -> f32 {
    switch (SOURCE) {
        case E4M3, E5M2: { return bitcast<f32>(source_scales[at]); }
        case I8, I4: {
            let scale = at + element / PER_SCALE;
            return f16_of(source_scales[scale / 2u], scale % 2u);
        }
        default: { return 1.0; }
    }
}

// Reads the row that starts at element `at`, word by word.
fn read_row(at: u32, scales: u32, thread: u32) {
    let lanes = 32u / bits_of(SOURCE);
    let first = at / lanes;
    let words = (at + DIM - 1u) / lanes - first + 1u;
    for (var w = thread; w < words; w += THREADS) {
        let word = source[first + w];
        for (var lane = 0u; lane < lanes; lane++) {
            let element = (first + w) * lanes + lane - at;
            if (element < DIM) {
                row[element] = decode(SOURCE, word, lane) * source_scale(scales, element);
            }
        }
    }
}

fn rotate_row(position: i32, first: u32, factor: f32, thread: u32) {
    let turn = (u32(abs(position)) - first) * PAIRS;
    for (var pair = thread; pair < PAIRS; pair += THREADS) {
        let x = select(pair, 2u * pair, INTERLEAVED);
        let y = select(pair + PAIRS, 2u * pair + 1u, INTERLEAVED);
        let angle = angles[turn + pair];
        let sine = select(angle.y, -angle.y, position < 0);
        let a = row[x];
        let b = row[y];
        row[x] = (a * angle.x - b * sine) * factor;
        row[y] = (a * sine + b * angle.x) * factor;
    }
}

fn largest_code() -> f32 {
    return select(127.0, 7.0, DEST == I4);
}

// Returns a group's scale, rounded up to the next f16, so that no finite element is clipped. Returns NaN if
// an element or the scale is not finite.
fn step_bits(group: u32) -> u32 {
    var most = 0u;
    for (var i = group * PER_SCALE; i < (group + 1u) * PER_SCALE; i++) {
        most = max(most, bitcast<u32>(row[i]) & 0x7fffffffu);
    }
    if (most >= 0x7f800000u) {
        return 0x7e00u;
    }
    let amax = bitcast<f32>(most);
    var near = f16_bits(amax / largest_code());
    if (near < 0x7c00u && f16_of(near, 0u) * largest_code() < amax) {
        near += 1u;
    } else if (near > 0u && f16_of(near - 1u, 0u) * largest_code() >= amax) {
        near -= 1u;
    }
    return select(near, 0x7e00u, near >= 0x7c00u);
}

fn make_steps(scales: u32, thread: u32) {
    for (var group = thread; group < GROUPS; group += THREADS) {
        let bits = step_bits(group);
        steps[group] = f16_of(bits, 0u);
        let at = scales + group;
        let shift = 16u * (at % 2u);
        atomicAnd(&dest_scales[at / 2u], ~(0xffffu << shift));
        atomicOr(&dest_scales[at / 2u], bits << shift);
    }
}

// Returns the source's bits for an element past the rotated pairs.
fn kept(element: u32) -> u32 {
    let bits = bits_of(SOURCE);
    let lanes = 32u / bits;
    let at = origin + element;
    return (source[at / lanes] >> (bits * (at % lanes))) & bits_between(0u, bits);
}

// Returns the destination's bits for an element of the row.
fn coded(element: u32) -> u32 {
    if (PAIRS > 0u && SOURCE == DEST && bits_of(SOURCE) >= 16u && element >= 2u * PAIRS) {
        return kept(element);
    }
    let x = row[element];
    switch (DEST) {
        case E4M3, E5M2: {
            let largest = select(448.0, 57344.0, DEST == E5M2);
            let finite = (bitcast<u32>(x) & 0x7fffffffu) < 0x7f800000u;
            return encode(DEST, select(x / static_scale, clamp(x / static_scale, -largest, largest), finite));
        }
        case I8, I4: {
            let step = steps[element / PER_SCALE];
            if (step > 0.0) { // neither zero nor NaN, for which all codes are 0
                return encode(DEST, clamp(x / step, -largest_code(), largest_code()));
            }
            return 0u;
        }
        default: { return encode(DEST, x); }
    }
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let n = vec2<u32>(args[1], args[2]);
    let run = linear(group, groups);
    let item = run / (n.x * n.y);
    if (item >= args[0]) {
        return;
    }
    let outer = run / n.y % n.x;
    let inner = run % n.y;
    let place = HEADER + PER_ITEM * item;
    let src = args[place] + args[3] * outer + args[7] * inner;
    let dst = args[place + 1u] + args[4] * outer + args[8] * inner;
    let src_scales = args[place + 2u] + args[5] * outer + args[9] * inner;
    let dst_scales = args[place + 3u] + args[6] * outer + args[10] * inner;

    read_row(src, src_scales, thread);
    workgroupBarrier();
    if (PAIRS > 0u) {
        rotate_row(bitcast<i32>(args[place + 4u]), args[11], bitcast<f32>(args[12]), thread);
        workgroupBarrier();
    }
    if (DEST == I8 || DEST == I4) {
        make_steps(dst_scales, thread);
        workgroupBarrier();
    }
    if (DEST == E4M3 || DEST == E5M2) {
        static_scale = bitcast<f32>(atomicLoad(&dest_scales[dst_scales]));
    }
    origin = src;
    write_row(dst, thread);
}
