// The rows of a copy: items at arbitrary offsets, each with a loop over three axes.
//
// args: [items, n0, n1, n2, threads per row, length of a row, strides of the three axes in the source,
// strides of the three axes in the destination], then the offsets of each item in source and destination.

const THREADS: u32 = 256u;
const HEADER: u32 = 12u;

struct Place {
    // True if the row exists.
    inside: bool,
    src: u32,
    dst: u32,
    // The thread's index within the row.
    at: u32,
}

fn place_of(id: u32) -> Place {
    // Splits the ID into its mixed-radix digits, starting at the last one, with few divisions, because these
    // are slow.
    let n = vec3<u32>(args[1], args[2], args[3]);
    let run = id / args[4];
    let outer = run / n.z;
    let first_axis = outer / n.y;
    let item = first_axis / n.x;
    if (item >= args[0]) {
        return Place(false, 0u, 0u, 0u);
    }
    let index = vec3<u32>(first_axis - item * n.x, outer - first_axis * n.y, run - outer * n.z);
    let src = vec3<u32>(args[6], args[7], args[8]) * index;
    let dst = vec3<u32>(args[9], args[10], args[11]) * index;
    let first = HEADER + 2u * item;
    return Place(
        true,
        args[first] + src.x + src.y + src.z,
        args[first + 1u] + dst.x + dst.y + dst.z,
        id - run * args[4],
    );
}
