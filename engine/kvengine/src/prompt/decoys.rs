//! The built-in decoys.

/// Short documents about various invented things: decoys for documents of any kind (see
/// [`kvchunk::ComputeMode::Behind`]).
///
/// Decoys that resemble the documents preserve more answers. If all documents are of one kind, use a few
/// decoys of that kind instead.
pub const BUILT_IN_DECOYS: [&str; 7] = [
    "The ferry Saint Osla crosses the Varn strait six times a day. It was built in 1974 by the Tolmen yard and carries \
     310 passengers and 42 cars. Its captain is Runa Eskeland. The crossing from Hollin Quay to Marrow Point takes 55 \
     minutes, and a return ticket costs 18 crowns. In winter the last boat leaves at seven in the evening.\n",
    "Tessaly Brandt teaches geography at the Wendel school in Arnsby. She has worked there since 2006 and leads the \
     hiking club, which has 27 members. Before that she drew maps for the Korrin mining company. Her book about the \
     rivers of the north won the Halder prize. She lives on Tanner Street with her brother, who repairs pianos.\n",
    "The grey-banded loper is a bird of the Ister marshes. It is 31 centimetres long and weighs about 140 grams. The \
     female lays four spotted eggs in May, and the young leave the nest after 23 days. Lopers eat snails and water \
     beetles. The species was described by Emil Darrow in 1887. About 2,600 pairs are left.\n",
    "Model K-40 of the Brevik coffee machine heats 1.2 litres of water in four minutes. To clean it, empty the tank, \
     press the left button for five seconds and wait until the yellow light goes out. The filter must be changed after \
     90 cups. The guarantee lasts three years. Spare parts are sold by Ondal and Sons in Greymouth.\n",
    "The Larkin bridge spans the river Dove near Cobham Mill. It is 212 metres long and rests on nine arches of red \
     sandstone. Ilse Varga designed it, and it was opened in 1903 after six years of work. A flood damaged two arches \
     in 1951. Trucks above 12 tonnes must take the road through Penhall.\n",
    "Minutes of the meeting of 14 March. Present: Ada Lorne, Piet Haverkamp and Joss Milner. The budget for the new \
     archive was set at 64,000. Piet will ask three firms for offers by Friday. The move from Castle Road is planned \
     for September. Joss reported that the scanner has failed twice. The next meeting is on 11 April in room 208.\n",
    "Pell bread is baked in the villages around Lake Soren. The dough of rye, honey and caraway rests for 16 hours and \
     is baked at 210 degrees. A loaf weighs 800 grams and keeps for two weeks. The bakery of Mirko Talas in Eastfold \
     sells about 350 loaves a day. Every August, Eastfold holds a fair in honour of the bread.\n",
];
